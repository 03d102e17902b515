"""A world whose truth is what was measured while jobs ran live: the event log of one run, as the costs of another."""

from icefrog.executors.sim.recorded.recording import JobRecording, Recording, record
from icefrog.executors.sim.recorded.world import RecordedWorld, recorded_scenario, recorded_settings

__all__ = ["JobRecording", "RecordedWorld", "Recording", "record", "recorded_scenario", "recorded_settings"]
