"""Steps in the middle of a run, and the versions of the weights that they leave.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from parlinalg.pipeline.schedule import Instruction, Op


def stepping(computed: Iterable[Instruction], every: int) -> Iterator[Instruction]:
    """A rank's computations, and a step after every so many backward passes."""
    for instruction in computed:
        yield instruction
        j = instruction.microbatch
        if instruction.op is Op.BACKWARD and (j + 1) % every == 0:
            yield Instruction(Op.REDUCE_GRADIENTS, 0, j)
            yield Instruction(Op.STEP, 0, j)


def kept(order: Iterable[Instruction], weights: Sequence[int]) -> int:
    """The most versions a rank keeps at once: the newest one, and all that are still to be used.

    Parameters
    ----------
    order : iterable of Instruction
        The rank's.
    weights : sequence of int
        By microbatch, the steps behind the weights it works with.
    """
    steps, left = 0, Counter(weights)  # left: by version, the microbatches still to use it
    there, most = {0}, 1
    for instruction in order:
        if instruction.op is Op.STEP:
            if not left[steps]:
                there.discard(steps)
            steps += 1
            there.add(steps)
            most = max(most, len(there))
        elif instruction.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            used = weights[instruction.microbatch]
            left[used] -= 1
            if not left[used]:
                there.discard(used)
    return most
