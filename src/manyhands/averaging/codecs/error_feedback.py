"""Error feedback: what a lossy codec lost of this peer's values in one round is added to them in the next.

With it the sum of what was decoded over many rounds is that of the values, but for the residual of the last one (if the
weights of the members stay as they are, and rounds that this peer did not see committed do not count); so
training with it converges as fast as without a codec (up to constants), and without it need not converge at all.

Sources: Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Karimireddy et al., Error feedback fixes
SignSGD, arXiv:1901.09847; Tang et al., DoubleSqueeze, arXiv:1905.05957 (feedback at the reducer as well).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from manyhands.averaging.codecs.plan import Plan


class ErrorFeedback:
    """The residuals of one stream of vectors: of what a peer sends, or of the means that it reduced; not of both.

    In each round: ``encode`` each slice that is sent, then ``commit`` if the others used it, else ``abort``. Slices may
    be encoded from several threads at once; ``commit`` and ``abort`` come when all of these are done. Values that were
    not encoded in a round (a peer's own span) keep their residual.

    Memory: one vector, and during a round one more for what was encoded.

    Args:
        plan: of the vector.
        device: of the values.
    """

    def __init__(self, plan: Plan, device: torch.device | str = "cpu") -> None:
        self._plan = plan
        self._residual_N = torch.zeros(plan.numel, dtype=plan.dtype, device=device)
        self._pending: list[tuple[slice, torch.Tensor]] = []

    def encode(self, values: torch.Tensor, start: int, out: torch.Tensor) -> torch.Tensor:
        """Encode ``values``, which is ``flat_N[start : start + len(values)]``, with the residual of its last round.

        Returns:
            What the receivers will decode, of the plan's dtype.
        Raises:
            NotFinite: a value is not finite, or its sum with the residual.
            ConfigError: a shape or a dtype is another one.
        """
        part = slice(start, start + values.numel())
        corrected = values + self._residual_N[part]
        self._plan.encode(corrected, start, out)
        decoded = torch.empty_like(corrected)
        self._plan.decode(out, start, decoded)
        self._pending.append((part, corrected.sub_(decoded)))
        return decoded

    def commit(self) -> None:
        """The round counts: what it lost is added in the next one."""
        for part, residual in self._pending:
            self._residual_N[part] = residual
        self._pending.clear()

    def abort(self) -> None:
        """The round does not count: the residuals are those from before it."""
        self._pending.clear()

    def reset(self) -> None:
        """Forget all residuals: the values are no longer those of before, as after loading another peer's state."""
        self._pending.clear()
        self._residual_N.zero_()


@dataclass(frozen=True)
class Feedbacks:
    """Those of a peer in the rounds of one codec.

    Attributes:
        sent: of its values that others reduce.
        reduced: of the means that it reduces.
    """

    plan: Plan
    sent: ErrorFeedback
    reduced: ErrorFeedback

    @classmethod
    def of(cls, plan: Plan) -> Feedbacks:
        """Without any residual yet."""
        return cls(plan, ErrorFeedback(plan), ErrorFeedback(plan))

    def commit(self) -> None:
        """The round counts."""
        self.sent.commit()
        self.reduced.commit()

    def abort(self) -> None:
        """The round does not count; nothing happens if it was committed."""
        self.sent.abort()
        self.reduced.abort()
