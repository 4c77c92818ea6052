"""`amp.scalars()`: numbers to log every iteration, which the host knows without waiting."""

from __future__ import annotations

from amp_engine.engine import Engine
from amp_engine.errors import AmpStateError


def scalars(engine: Engine) -> dict[str, float]:
    """Scales and skips that the host knows of, by a name to log them under.

    Returns:
        "amp/loss_scale": the scale of the next backward; with several losses "amp/loss_scale/0" and so on. Missing
        while the host does not know it. "amp/skipped_steps": number since `initialize`, of all optimizers together.
        "amp/skips_in_a_row": number for the optimizer that has most now. "amp/overflow_share": share, 0 to 1, of the
        checked backwards since `initialize` that overflowed. Empty if not enabled.

    No host sync; on a GPU the last steps may be missing.

    Raises AmpStateError before `initialize` and after `close`.
    """
    policy = engine.policy
    if policy is None:
        raise AmpStateError(
            "amp.scalars() was called, but amp.initialize() was not, or amp.close() was.  Call model, optimizer = "
            "amp.initialize(model, optimizer, opt_level=...) first."
        )
    if not policy.enabled:
        return {}
    history, scalers = engine._scaling.history, engine.scalers
    tracks = [history.track(loss_id) for loss_id in range(len(scalers))]
    found: dict[str, float] = {}
    for loss_id, (scaler, track) in enumerate(zip(scalers, tracks, strict=True)):
        # Reads a scale on the CPU directly: it may have been loaded or written since the track's last entry.
        scale = float(scaler.scale) if scaler.scale.is_cpu else track.scale
        if scale is not None:
            found["amp/loss_scale" if len(scalers) == 1 else f"amp/loss_scale/{loss_id}"] = scale
    pendings = [one.pending for one in engine.records.all]
    for pending in pendings:
        pending.hear(wait=False)
    backwards = sum(track.backwards for track in tracks)
    found["amp/skipped_steps"] = float(sum(pending.skips for pending in pendings))
    found["amp/skips_in_a_row"] = float(max((pending.skips_in_a_row for pending in pendings), default=0))
    found["amp/overflow_share"] = sum(track.overflows for track in tracks) / backwards if backwards else 0.0
    return found
