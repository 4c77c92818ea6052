"""What the engine tells of itself: records first, rendering apart."""
