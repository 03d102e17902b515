"""What one optimizer step is made of: passes, micro-steps, samples, and what each sample weighs in the step's gradient."""

from __future__ import annotations

from collections.abc import Callable

from icefrog.errors import UserError
from icefrog.runtime.parallel import Parallel
from icefrog.runtime.sampler import ElasticSampler
from icefrog.runtime.statistics import Statistics


class Counting:
    """Owned by :class:`~icefrog.runtime.engine.Engine`.

    An optimizer step is ``accum_steps`` micro-steps, each closed by a call of ``optimizer.step()``. A micro-step is mostly
    one *pass*: a forward pass of the model with gradients, and its backward pass. The model says when a forward pass
    begins (:meth:`see`); that is all that tells what a loop does. So the last pass is in one of two states:

    - **closed**: it belongs to a micro-step that is over, or to none. The next pass begins a micro-step.
    - **open**: nobody knows yet what becomes of it.

    What closes an open pass, or replaces it:

    ====================================  ==============================================================
    the loop goes on with                 the pass
    ====================================  ==============================================================
    ``optimizer.step()``                  is counted with those before it, and closed
    a pass, after this one's backward     is one of several in its micro-step (accumulation by the user)
    a pass, without a backward before     is forgotten: it was a look (a validation with gradients on)
    ``zero_grad``, after the backward     is closed and not counted, nor those before it (a batch left out)
    ``zero_grad``, before the backward    stays open; those before it are not counted
    ====================================  ==============================================================

    Weights: gradients are means over a pass's samples, while in the end every sample must weigh the same, n_r / M for the
    n_r samples of this rank. Where micro-steps differ in size, what is accumulated so far is rescaled between two of them
    to the unit of the next: by the sampler's sizes, which are known before, else when the next pass begins.

    Args:
        accum_steps: k.
        parallel: whose accumulated gradients are rescaled.
        num_gpus: a.
        statistics: gives those in use, which see the same gradients and must know the same weights.
    """

    def __init__(
        self, accum_steps: int, parallel: Parallel, num_gpus: int, statistics: Callable[[], Statistics]
    ) -> None:
        self.accum_steps = accum_steps
        self.sampler: ElasticSampler | None = None
        self.micro = 0
        """Micro-steps done since the last optimizer step."""
        self.passes = 1
        """1, and one for each further backward pass in the micro-steps since the last optimizer step."""
        self.step_samples = 0
        """Of the optimizer step so far, on this replica."""
        self.batch_per_gpu = 0
        """Of a replica: the largest micro-step's samples seen."""
        self._parallel = parallel
        self._num_gpus = num_gpus
        self._statistics = statistics
        self._open = False  # the last pass: see above
        self._samples = 0  # of the last pass, from the model's input; of the whole micro-step, once that is over
        self._earlier_samples = 0  # of passes before it in the same micro-step, each with a backward of its own
        self._whole = False  # it was a train_step, whose backward pass is over when it returns
        self._cut_off = False  # communication was rebuilt behind its forward, and before its backward
        self._unit = 0  # samples of the micro-step whose gradient has weight 1 in the accumulated one
        self._units = 0  # sum over the micro-steps since the last optimizer step
        self._largest_step = 0  # samples of the largest optimizer step so far, over all ranks

    # --- the events, in the order of a step

    @property
    def between_steps(self) -> bool:
        """Whether the next pass is the first of an optimizer step."""
        return not self._open and self.micro == 0

    @property
    def pass_is_open(self) -> bool:
        """Whether nobody knows yet what becomes of the last pass."""
        return self._open

    def see(self, samples: int, *, backward_ran: bool) -> None:
        """A forward pass begins.

        Args:
            samples: from the model's input; 0: cannot be told.
            backward_ran: the pass before it has had its backward.

        Raises:
            UserError: several passes in one micro-step, where ranks would not average the first ones' gradients.
        """
        if self._open and backward_ran:
            self._earlier_samples += self._samples
            self.passes += 1
            if self._parallel.num_replicas > 1 and self.accum_steps > 1:
                raise UserError(
                    f"several backward passes before one optimizer.step(), with accum_steps={self.accum_steps}",
                    "call optimizer.step() after each backward pass: every k-th call steps, on the average",
                )
        first, self._open, self._samples = not self._open, True, samples
        self._whole = self._cut_off = False
        if first and self.sampler is None and self.accum_steps > 1:
            self._weigh_own(samples)

    def saw_whole(self) -> None:
        """The pass was a ``train_step``: its backward is over."""
        self._whole = True

    def communication_rebuilt(self, *, backward_ran: bool) -> None:
        """What averages gradients was made anew; an open pass without its backward has lost its part in that."""
        self._cut_off = self._open and not backward_ran

    def forget_passes(self, *, backward_ran: bool) -> None:
        """``zero_grad``: passes that no optimizer step followed do not count."""
        self._earlier_samples, self.passes = 0, 1
        if self._whole or backward_ran:
            self._open = False

    def end_micro(self, cursor: int) -> int:
        """A micro-step's backward is over; its samples.

        Raises:
            UserError: the boundary moved between its forward and its backward pass, so ranks did not average gradients.
        """
        if self._cut_off:
            raise UserError(
                "the boundary moved between a forward pass and its backward pass: that one was not synchronised",
                "call freeze(), decide() and end_epoch() before the forward pass, or after optimizer.step()",
            )
        self._samples += self._earlier_samples
        self._earlier_samples, self._open = 0, False
        samples = self._micro_samples(self.micro, cursor)
        self.step_samples = samples + (self.step_samples if self.micro > 0 else 0)
        self.micro = (self.micro + 1) % self.accum_steps
        self.batch_per_gpu = max(self.batch_per_gpu, samples)
        return samples

    def observed(self, total_samples: int) -> None:
        """The ranks have agreed on M of the optimizer step, and its statistics are read."""
        self._largest_step = max(self._largest_step, total_samples)
        self.passes = 1

    def end_step(self) -> None:
        """The optimizer has stepped; it may have run its closure again (LBFGS), and those passes count nothing."""
        self._earlier_samples, self._open = 0, False

    def abandon(self) -> None:
        """What was accumulated is gone."""
        self.micro = 0

    # --- weights

    def prepare(self, cursor: int) -> None:
        """Before a step's first forward: the weight of this rank's gradient, n_r / M."""
        if self.accum_steps == 1:
            self._set_weight(self._micro_samples(0, cursor), cursor)

    def weigh_next(self, samples: int, cursor: int) -> None:
        """Between two micro-steps, by what the sampler says of the next; ``samples``: of the one that is over."""
        following = self._micro_samples(self.micro, cursor)
        if following != samples:
            self._rescale(samples / following)
        if self.micro == self.accum_steps - 1:
            self._set_weight(following, cursor)

    def _weigh_own(self, samples: int) -> None:
        """A micro-step begins whose size nobody told before (a loader of the user's own)."""
        if self.micro > 0 and samples not in (0, self._unit):
            self._rescale(self._unit / samples)
        self._unit, self._units = samples, samples + (self._units if self.micro > 0 else 0)
        if self.micro == self.accum_steps - 1 and samples > 0:
            mean_scale = samples / self._units
            self._statistics().set_weight(mean_scale / self._parallel.num_replicas, mean_scale)

    def _set_weight(self, last_micro_samples: int, cursor: int) -> None:
        """The bucket holds g_r * n_r / n_last after the micro-steps: make it n_r / M of the average."""
        if self.sampler is None or self.sampler.next_size(cursor) == 0:
            mean_scale = 1.0 / self.accum_steps
            weight = mean_scale / self._parallel.num_replicas
        else:
            sizes = self.sampler.step_sizes(cursor)
            mean_scale = last_micro_samples / sizes.of_rank(self._parallel.replica)
            weight = last_micro_samples / sizes.total
        self._statistics().set_weight(weight, mean_scale)

    def _rescale(self, factor: float) -> None:
        self._parallel.scale_gradients(factor)
        self._statistics().rescale_micro(factor)

    def _micro_samples(self, micro: int, cursor: int) -> int:
        if self.sampler is not None and self.sampler.next_size(cursor) > 0:
            return self.sampler.step_sizes(cursor).sizes[micro][self._parallel.replica]
        return self._samples

    # --- sizes

    @property
    def full_step(self) -> bool:
        """Whether the optimizer step is as large as they come: the last of an epoch may be smaller."""
        return self.step_samples == self.batch_per_gpu * self.accum_steps

    @property
    def share(self) -> float:
        """This rank's share of the optimizer step's samples: ranks of one replica see the same. Summed over ranks: M."""
        return self.step_samples * self._parallel.num_replicas / self._num_gpus

    @property
    def waiting_samples(self) -> float:
        """:attr:`share` of micro-steps that wait for their optimizer step; 0: none do."""
        return self.share if self.micro > 0 else 0.0

    @property
    def global_batch(self) -> int:
        """M in samples, the same on every rank: the sampler's, else of the largest step so far (from its reduction on)."""
        return self.sampler.global_batch if self.sampler is not None else self._largest_step

    @property
    def nominal_batch(self) -> int:
        """M in samples, of a full step."""
        return max(self.batch_per_gpu, 1) * self._parallel.num_replicas * self.accum_steps

    @property
    def samples_per_gpu(self) -> int:
        """m: a nominal micro-step's samples over the GPUs that work on them."""
        return max(-(-self.batch_per_gpu * self._parallel.num_replicas // self._num_gpus), 1)
