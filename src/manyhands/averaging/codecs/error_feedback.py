"""Error feedback: what a lossy codec lost of this peer's values in one round is added to them in the next.

With it the sum of the means over many rounds is that of exact ones, but for the residuals of the last one (if no member
is lost on the way, and rounds that this peer did not see committed do not count); so training with it converges as fast
as without a codec (up to constants), and without it need not converge at all. What is lost of a vector is lost to the
mean by the share that the vector has in it, so it is added by that share too: twice as much of it when the share of the
next vector is half as large.

Sources: Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Karimireddy et al., Error feedback fixes
SignSGD, arXiv:1901.09847; Tang et al., DoubleSqueeze, arXiv:1905.05957 (feedback at the reducer as well).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from manyhands.averaging.codecs.plan import Plan

MAX_SCALE = 1024.0
"""Residuals are enlarged by no more than this, so that what a tiny share sends stays finite. The rest is lost."""


class ErrorFeedback:
    """The residuals of one stream of vectors: of what a peer sends, or of the means that it reduced; not of both.

    In each round: ``encode`` each slice that is sent, then ``commit`` if the others used it, else ``abort``. Slices may
    be encoded from several threads at once; ``commit`` and ``abort`` come when all of these are done. Values that were
    not encoded in a round (a peer's own span) keep their residual.

    Memory: one vector, and during a round one more for what was encoded.

    Args:
        plan: of the vector.
        device: of the values.

    Attributes:
        share: of the vectors in the mean, from the next round on; above 0 whenever there is something to encode.
    """

    def __init__(self, plan: Plan, device: torch.device | str = "cpu") -> None:
        self.share = 1.0
        self._kept_share = 1.0  # for which the residuals are scaled
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
        corrected = torch.add(values, self._residual_N[part], alpha=min(self._kept_share / self.share, MAX_SCALE))
        self._plan.encode(corrected, start, out)
        decoded = torch.empty_like(corrected)
        self._plan.decode(out, start, decoded)
        self._pending.append((part, corrected.sub_(decoded)))
        return decoded

    def commit(self) -> None:
        """The round counts: what it lost is added in the next one."""
        if self._pending and self.share != self._kept_share:
            self._residual_N.mul_(min(self._kept_share / self.share, MAX_SCALE))  # also of what was not encoded
            self._kept_share = self.share
        for part, residual in self._pending:
            self._residual_N[part] = residual
        self._pending.clear()

    def abort(self) -> None:
        """The round does not count: the residuals are those from before it."""
        self._pending.clear()


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
