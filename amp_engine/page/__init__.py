"""How tables and pages look, as text and as HTML."""
