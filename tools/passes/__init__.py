"""Graph passes that stand outside of the library, as those of an engine would: entry points."""
