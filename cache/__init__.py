"""Keys, a content-addressed store and bundles: bytes and names, never models."""
