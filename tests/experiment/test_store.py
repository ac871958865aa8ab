"""`store:` as a text and as a mapping: what it reads as, and what is refused."""

from __future__ import annotations

import pytest

from raysd.experiment.store import S3Section, read_store


@pytest.mark.parametrize("folder", ["runs", "../runs", "/data/runs", "~/runs", "s3", "a:b", "C:runs", "runs with blanks", "r\u00e9sultats"])
def test_a_folder_stays_as_it_is(folder: str):
    assert read_store(folder) == folder


@pytest.mark.parametrize(
    ("text", "bucket", "prefix", "settings"),
    [
        ("s3://bucket", "bucket", "", {}),
        ("s3://bucket/", "bucket", "", {}),
        ("s3://my.bucket-1/a/b_c/", "my.bucket-1", "a/b_c/", {}),
        ("s3://bucket/a?region=eu-west-1", "bucket", "a/", {"region": "eu-west-1"}),
        (
            "s3://bucket/a?endpoint_url=http://10.0.0.1:9000&addressing_style=path",
            "bucket",
            "a/",
            {"endpoint_url": "http://10.0.0.1:9000", "addressing_style": "path"},
        ),
        ("s3://bucket?endpoint_url=https%3A%2F%2Fminio.example%3A9000", "bucket", "", {"endpoint_url": "https://minio.example:9000"}),
    ],
)
def test_s3_reads_into_its_parts_and_back(text: str, bucket: str, prefix: str, settings: dict[str, str]):
    section = read_store(text)
    assert isinstance(section, S3Section) and (section.bucket, section.prefix) == (bucket, prefix)
    assert section == S3Section(uri=text.partition("?")[0], **settings)
    assert read_store(section.text()) == section


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "neither a folder nor S3"),
        ("  ", "neither a folder nor S3"),
        ("a\0b", "neither a folder nor S3"),
        ("gs://bucket/x", "neither a folder nor S3"),
        ("http://host/x", "neither a folder nor S3"),
        ("s3:/bucket/x", "not s3://BUCKET/PREFIX"),
        ("s3:bucket", "not s3://BUCKET/PREFIX"),
        ("s3://", "not a bucket's name"),
        ("s3://b/x", "not a bucket's name"),
        ("s3://user:secret@bucket/x", "not a bucket's name"),
        ("s3://buck et/x", "not a bucket's name"),
        ("s3://bucket/../x", "plain names"),
        ("s3://bucket/a/./b", "plain names"),
        ("s3://bucket/a b", "plain names"),
        ("s3://bucket/%2e%2e/x", "plain names"),
        ("s3://bucket/a#b", "not s3://BUCKET/PREFIX"),
        ("s3://bucket/a?colour=red", "colour"),
        ("s3://bucket/a?endpoint_url=minio:9000", "endpoint_url"),
        ("s3://bucket/a?endpoint_url=http://host/path", "endpoint_url"),
        ("s3://bucket/a?addressing_style=pathetic", "addressing_style"),
        ("s3://bucket/a?region=EU WEST", "region"),
        ("s3://bucket/a?region", "s3://bucket/a?region"),
    ],
)
def test_what_is_no_store_is_refused_and_shown(text: str, words: str):
    with pytest.raises(ValueError) as caught:
        read_store(text)
    assert words in str(caught.value)


def test_a_mapping_says_the_same_as_a_text():
    mapping = {"uri": "s3://bucket/a", "endpoint_url": "http://10.0.0.1:9000", "addressing_style": "path"}
    assert (
        read_store(mapping) == S3Section(**mapping) == read_store("s3://bucket/a?endpoint_url=http://10.0.0.1:9000&addressing_style=path")
    )


@pytest.mark.parametrize(
    "mapping",
    [
        {},
        {"uri": None},
        {"uri": "s3://bucket", "secret": "x"},
        *({"uri": uri} for uri in ("bucket/x", "/folder", "s3://bucket/x?region=y", "s3://bucket/../x", "s3://b")),
    ],
)
def test_a_mapping_is_held_to_the_same(mapping: dict[str, str | None]):
    with pytest.raises(ValueError):
        read_store(mapping)
