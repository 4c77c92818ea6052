"""`apex.parallel.sync_batchnorm`."""

from amp_engine.apex.parallel.optimized_sync_batchnorm import SyncBatchNorm as SyncBatchNorm
