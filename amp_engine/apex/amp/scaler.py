"""`apex.amp.scaler`."""

from amp_engine.scaling.scaler import LossScaler as LossScaler
