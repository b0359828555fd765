"""Ways in: one module per source that the reader can drain."""
