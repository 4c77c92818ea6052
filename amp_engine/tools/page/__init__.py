"""Pages and tables, written as text and as HTML."""
