"""What tests send to workers: these import this module, not one that pytest has imported."""

import os

import torch


def process() -> int:
    return os.getpid()


def of_another_version() -> None:
    torch.__version__ = "2.11.0"
