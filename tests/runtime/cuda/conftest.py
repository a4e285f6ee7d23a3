"""Fixtures of tests of launches: a driver library without a GPU."""

from tests.support.cuda.fake_driver import fake, gpu, library

__all__ = ["fake", "gpu", "library"]
