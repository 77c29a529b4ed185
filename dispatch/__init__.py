"""Pure dispatch policy: modes, descriptors, sizes, and the table that maps a batch to a graph."""
