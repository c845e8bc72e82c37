"""What the workers of one replica agree on, so that all of them make the same passes over the experts in the same order.

With data parallelism every worker has requests of its own and attends to them alone, but the experts are spread over all of them: a pass
over a layer's experts is an exchange of all ranks. So before each pass that not everybody may need (a step, drafts from a hand-off's
hidden state, one more draft step) the workers say whether they need it, and it is made by all or by none: who needs it not joins it
without rows. Each rank asks its namesakes in the other workers; the ranks of one worker run one plan, hence ask and hear the same.
"""

import torch

from glm_runtime.parallel.collectives import Collectives


class LockStep:
    """The agreement of one rank with its namesakes. data: their group; of one member it agrees with itself and exchanges nothing."""

    def __init__(self, data: Collectives) -> None:
        self._data = data

    def anyone(self, *wishes: bool) -> tuple[bool, ...]:
        """Of each wish, whether any worker has it; one exchange of a byte each. All ranks ask at the same time, as many things."""
        if self._data.size == 1:
            return wishes
        asked = self._data.all_gather(torch.tensor(wishes, dtype=torch.uint8))
        return tuple([bool(count) for count in asked.sum(dim=0).tolist()])

    def goes_on(self, wish: bool) -> bool:
        """Whether any worker wants one more."""
        return self.anyone(wish)[0]
