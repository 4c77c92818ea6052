"""`amp.receipt()`: one page about a run. Each section has a file that collects it from an engine and writes it."""

from amp_engine.telemetry.receipt.document import Receipt as Receipt
from amp_engine.telemetry.receipt.document import receipt as receipt
