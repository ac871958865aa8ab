"""A real S3 server for the tests of this folder."""

from tests.s3_server import s3_endpoint, s3_place

__all__ = ["s3_endpoint", "s3_place"]
