"""`amp.receipt()`: one page about a run. Each section has its own file, which collects and writes it."""

from amp_engine.tools.telemetry.receipt.document import Receipt as Receipt
from amp_engine.tools.telemetry.receipt.document import receipt as receipt
