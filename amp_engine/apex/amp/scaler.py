"""`apex.amp.scaler`."""

from amp_engine.scaler import LossScaler as LossScaler
