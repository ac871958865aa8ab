"""A real server of S3 for the tests of this folder."""

from tests.s3_server import s3_endpoint, s3_place  # noqa: F401
