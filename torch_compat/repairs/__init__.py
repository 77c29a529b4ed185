"""Repairs of wrong results of torch, each with the versions it is for."""
