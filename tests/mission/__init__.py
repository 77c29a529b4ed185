"""What the library must be able to do, one test per capability, through public names alone.

A capability is removed only by changing `docs/architecture.md`, which lists these tests.
"""
