"""IceShare: the exact solver of the cluster-wide decision (section 8), as a library without side effects.

problem = parse_problem(json.load(file))          # or Problem.from_jobs / Problem.from_arrays
solution = solve(problem, rho=1.0)                # verified; solution.to_json() is the contract of `icefrog solve`
"""

from icefrog.policies.iceshare.parse import parse_problem
from icefrog.policies.iceshare.problem import ExclusiveOption, Job, Problem, SharedOption
from icefrog.policies.iceshare.solution import InvalidSolutionError, Solution, verify
from icefrog.policies.iceshare.solve import solve

__all__ = [
    "ExclusiveOption",
    "InvalidSolutionError",
    "Job",
    "Problem",
    "SharedOption",
    "Solution",
    "parse_problem",
    "solve",
    "verify",
]
