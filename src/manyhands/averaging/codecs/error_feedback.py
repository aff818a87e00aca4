"""Error feedback: adds the error of a lossy codec in one round to this peer's values in the next.

With it the sum of the means over many rounds equals the sum of the exact means, up to the residuals of the last round.
(This assumes that no member is lost, and does not count rounds that this peer did not see committed.) So training
converges as fast as without a codec, up to constants; without feedback it need not converge at all.

A vector, and so its error, enters the mean multiplied by the vector's share of all weight. If the share of the next
vector is half as large, the error is therefore added to it twice.

Sources: Seide et al., 1-bit stochastic gradient descent, Interspeech 2014; Karimireddy et al., Error feedback fixes
SignSGD, arXiv:1901.09847; Tang et al., DoubleSqueeze, arXiv:1905.05957 (feedback at the reducer as well).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from manyhands.averaging.codecs.codec import NotFinite, square_of
from manyhands.averaging.codecs.plan import Plan

MAX_SCALE = 1024.0
"""Limit of the factor by which residuals grow when the share shrinks, so that they stay finite; the rest is lost."""
OF_MEAN = 0.25
"""A reducer adds residuals of at most this multiple of the mean's norm, chunk by chunk; the rest is lost. So what it
sends is nearer to the mean than zeros are, as its checks ask (:mod:`manyhands.averaging.allreduce.checks`)."""


class ErrorFeedback:
    """The residuals of one series of vectors: of a peer's own values, or of the means that it reduced; not of both.

    In each round: ``encode`` each slice that is sent, then ``commit`` if the others used it, else ``abort``. Several
    threads may encode slices at once; call ``commit`` and ``abort`` when all are done. Values that were not encoded in
    a round (a peer's own span) keep their residual.

    Memory: one vector, and during a round one more for encoded values.

    Args:
        most: the residuals of a slice count for at most this multiple of the norm of its values.

    Attributes:
        share: weight of this round's vector as a fraction of all weight, above 0. Set it before the values are encoded.
    """

    def __init__(self, plan: Plan, most: float = math.inf) -> None:
        self.share = 1.0
        self._most = most
        self._max_scale = MAX_SCALE
        self._decay = plan.decay
        self._kept_share = 1.0  # the share that the residuals are scaled for
        self._plan = plan
        self._residual_N = torch.zeros(plan.numel, dtype=plan.dtype)
        self._norm: float | None = 0.0  # of the residuals; None if it was not measured since they changed
        self._pending: dict[int, tuple[slice, torch.Tensor]] = {}  # by start: the errors of this round

    def encode(self, values: torch.Tensor, start: int, out: torch.Tensor) -> torch.Tensor:
        """Encode ``values``, which is ``flat_N[start : start + len(values)]``, plus its residual of the last round.

        Returns the values that receivers will decode, of the plan's dtype; raises as :meth:`Plan.encode`.
        """
        part = slice(start, start + values.numel())
        corrected = self.corrected(values, part)
        if self._most < math.inf:
            self._bound(corrected, values, part)
        self._plan.encode(corrected, start, out)
        decoded = torch.empty_like(corrected)
        self._plan.decode(out, start, decoded)
        self._pending[start] = part, corrected.sub_(decoded)
        return decoded

    def as_sent(self, values: torch.Tensor, start: int) -> torch.Tensor | None:
        """What receivers decode of values that :meth:`encode` has encoded in this round; None if it has not."""
        if (pending := self._pending.get(start)) is None or pending[0].stop != start + values.numel():
            return None
        part, residual = pending
        return self.corrected(values, part).sub_(residual)

    def corrected(self, values: torch.Tensor, part: slice) -> torch.Tensor:
        """The values of a part of the vector plus their residual."""
        scale = self._decay * min(self._kept_share / self.share, self._max_scale)
        return torch.add(values, self._residual_N[part], alpha=scale)

    def _bound(self, corrected: torch.Tensor, values: torch.Tensor, part: slice) -> None:
        """Scale down what was added to values, where it is too large beside them."""
        for run, _ in self._plan.compared(part.start, part.stop):
            added = corrected[run] - values[run]
            most, square = self._most**2 * square_of(values[run]), square_of(added)
            if square > most:
                torch.add(values[run], added, alpha=math.sqrt(most / square), out=corrected[run])

    def norm(self) -> float:
        """The L2 norm of the residuals. Measuring it takes a pass over them, once in each round."""
        if self._norm is None:
            self._norm = math.sqrt(square_of(self._residual_N))
        return self._norm

    def grow_at_most(self, norm: float) -> None:
        """Limit the residuals of this round to their present norm and this one; the rest is lost."""
        present = self.norm() if norm < math.inf else 0.0
        self._max_scale = min(MAX_SCALE, 1.0 + norm / present) if present else MAX_SCALE

    def commit(self) -> None:
        """Count the round: its errors are added in the next one."""
        if self._pending:
            self._norm = None
        if self._pending and self.share != self._kept_share:
            self._residual_N.mul_(min(self._kept_share / self.share, self._max_scale))  # also where nothing was encoded
            self._kept_share = self.share
        for part, residual in self._pending.values():
            self._residual_N[part] = residual
        self._pending.clear()

    def abort(self) -> None:
        """Discard the round: restore the residuals from before it."""
        self._pending.clear()


@dataclass(frozen=True)
class Feedbacks:
    """A peer's error feedback with one codec: of the values that it sends, and of the means that it reduces."""

    plan: Plan
    sent: ErrorFeedback
    reduced: ErrorFeedback

    @classmethod
    def of(cls, plan: Plan) -> Feedbacks:
        return cls(plan, ErrorFeedback(plan), ErrorFeedback(plan, OF_MEAN))

    def commit(self, *, is_left_out: bool = False) -> None:
        """Count the round; if the others have left this peer's values out, their errors are discarded."""
        if is_left_out:
            self.sent.abort()
        else:
            self.sent.commit()
        self.reduced.commit()

    def abort(self) -> None:
        """Discard the round; no effect after a commit."""
        self.sent.abort()
        self.reduced.abort()


def sent_norm(plan: Plan, flat_N: torch.Tensor, feedback: ErrorFeedback | None) -> float:
    """The L2 norm of what is sent of a vector, as receivers decode it; infinite if the vector is not finite.

    Like :meth:`Plan.norm`, for codecs that send a small part of the values only.
    """
    square = 0.0
    for segment in plan.segments:
        codec = segment.codec
        step = max(codec.unit_numel, codec.block_numel - codec.block_numel % codec.unit_numel)
        for start in range(segment.start, segment.stop, step):
            part = slice(start, min(start + step, segment.stop))
            values = flat_N[part] if feedback is None else feedback.corrected(flat_N[part], part)
            encoded = torch.empty(plan.num_bytes(part.start, part.stop), dtype=torch.uint8)
            decoded = torch.empty_like(values)
            try:
                plan.encode(values, part.start, encoded)
            except NotFinite:
                return math.inf
            plan.decode(encoded, part.start, decoded)
            for gap in plan.uncompared(part):
                decoded[gap] = 0
            square += square_of(decoded)
    return math.sqrt(square)
