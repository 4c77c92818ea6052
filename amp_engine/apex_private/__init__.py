"""Views of an engine under apex's private names, and its older interface."""
