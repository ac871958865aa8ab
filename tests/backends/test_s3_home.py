"""S3's own troubles, over HTTP: lost answers, cut uploads, servers that are ill, old or strangers, and keys that open nothing."""

from __future__ import annotations

import contextlib
import re
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raysd.artifacts import ArtifactKey, Store
from raysd.artifacts.lease import hold_lease, newest_lease
from raysd.backends import s3_errors, s3_home
from raysd.backends.s3_home import S3Home
from raysd.errors import ArtifactError, ExperimentError, RaysdError, TryAgainError
from tests.artifacts.test_store import FILES, contents, publish
from tests.s3_server import ENDPOINT, FaultyProxy, S3Place, once, seeded

MIB = 1 << 20
FILE = f"tiny/train/{'a' * 32}/model.safetensors"
only_moto = pytest.mark.skipif(bool(ENDPOINT), reason="sets up moto's server in a way that another has no switch for")


@pytest.fixture
def proxy(s3_place: S3Place) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_place.section.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def home(s3_place: S3Place, proxy: FaultyProxy, tmp_path: Path) -> S3Home:
    """Through the proxy."""
    return S3Home(s3_place.at(proxy.endpoint), tmp_path / "cache")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Path]:
    """Writes a file of three parts, with parts as small as S3 allows and little patience."""
    monkeypatch.setattr(s3_home, "PART_BYTES", 5 * MIB)
    monkeypatch.setattr(s3_home, "ATTEMPTS", 3)

    def write(path: Path) -> Path:
        path.write_bytes(bytes(range(256)) * (12 * MIB // 256))
        return path

    return write


def test_it_is_named_as_the_store_option_takes_it(home: S3Home, s3_place: S3Place, proxy: FaultyProxy):
    assert home.uri == f"{s3_place.section.uri}?endpoint_url={proxy.endpoint}&addressing_style=path"
    assert home.place("a/b") == f"{s3_place.section.uri}/a/b"


@pytest.mark.parametrize("fault", ["lost", "reset", "cut", "500", "503"])
def test_a_lease_is_created_once_when_its_request_goes_wrong(home: S3Home, proxy: FaultyProxy, fault: str):
    proxy.plan = once(fault, "PUT", "lease-00001")
    with hold_lease(home, "tiny/train/x/", "tiny", "train", "x", {}) as held:
        assert proxy.done[fault] == 1
        assert newest_lease(home, "tiny/train/x/").lease.token == held.lease.token
        assert not home.create("tiny/train/x/lease-00001.json", b"another")
    assert [entry.key for entry in home.list("")] == ["tiny/train/x/lease-00001.json"]


def test_a_file_in_parts_arrives_whole_with_its_progress(small_parts, s3_place: S3Place, tmp_path: Path):
    moved: list[int] = []
    home = S3Home(s3_place.section, tmp_path / "cache")
    content = small_parts(tmp_path / "file").read_bytes()
    home.put_file(FILE, tmp_path / "file", moved.append)
    assert sum(moved) == len(content) and len(moved) > 3
    fetched = S3Home(s3_place.section, tmp_path / "other").fetch(FILE, moved.append)
    assert fetched.read_bytes() == content and sum(moved) == 2 * len(content)
    assert [path.name for path in fetched.parent.iterdir()] == ["model.safetensors"] and home.abandoned(0) == []


def test_an_upload_whose_last_answer_is_lost_arrives(small_parts, s3_place: S3Place, proxy: FaultyProxy, tmp_path: Path):
    home = S3Home(s3_place.at(proxy.endpoint), tmp_path / "cache")
    content = small_parts(tmp_path / "file").read_bytes()
    proxy.plan = once("lost", "POST", "uploadId=")
    home.put_file(FILE, tmp_path / "file")
    assert proxy.done["lost"] == 1 and home.get(FILE) == content and home.abandoned(0) == []


def test_an_upload_that_the_server_knows_no_more_is_done_again(small_parts, s3_place: S3Place, proxy: FaultyProxy, tmp_path: Path):
    home = S3Home(s3_place.at(proxy.endpoint), tmp_path / "cache")
    content = small_parts(tmp_path / "file").read_bytes()
    proxy.plan = once("404", "POST", "uploadId=")  # as AWS answers once an upload is closed or forgotten
    home.put_file(FILE, tmp_path / "file")
    assert proxy.done["404"] == 1 and home.get(FILE) == content and home.abandoned(0) == []


def test_an_upload_that_is_cut_leaves_nothing_that_counts(small_parts, s3_place: S3Place, proxy: FaultyProxy, tmp_path: Path):
    home = S3Home(s3_place.at(proxy.endpoint), tmp_path / "cache")
    proxy.plan = lambda method, path: "cut" if "partNumber=2" in path or method == "DELETE" else None
    with pytest.raises(TryAgainError) as caught:
        home.put_file(FILE, small_parts(tmp_path / "file"))
    proxy.plan = None
    assert caught.value.where == home.place(FILE) and (tmp_path / "file").exists()
    assert home.list("") == [] and home.get(FILE) is None
    (left,) = home.abandoned(0)
    assert left.key.startswith(f"{FILE}?uploadId=") and 0 < left.size_bytes <= 7 * MIB
    assert home.abandoned(1e9) == []  # moto dates every upload 2010
    home.forget([left.key, left.key])
    assert home.abandoned(0) == []


def test_what_lies_beside_its_prefix_or_is_no_part_of_an_artifact_is_left_alone(s3_place: S3Place, tmp_path: Path):
    home, client = S3Home(s3_place.section, tmp_path / "cache"), s3_place.client
    bucket, prefix = s3_place.section.bucket, s3_place.section.prefix
    beside = prefix.removesuffix("/") + "2/"
    for key in (beside + FILE, beside + ".probe-" + "0" * 32, beside.removesuffix("/")):
        client.put_object(Bucket=bucket, Key=key, Body=b"theirs")
    uploads = {key: client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"] for key in (beside + FILE, prefix + "video/film.mp4", prefix + FILE)}
    ours = f"{FILE}?uploadId={uploads[prefix + FILE]}"
    home.put(FILE, b"ours")
    assert [entry.key for entry in home.list("")] == [FILE] and [entry.key for entry in home.abandoned(0)] == [ours]
    home.forget([ours])
    home.delete([FILE])
    left = [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket, Prefix=prefix.removesuffix("/"))["Contents"]]
    assert left == [beside.removesuffix("/"), beside + ".probe-" + "0" * 32, beside + FILE]
    begun = client.list_multipart_uploads(Bucket=bucket, Prefix=prefix.removesuffix("/"))["Uploads"]
    assert {upload["Key"] for upload in begun} == {beside + FILE, prefix + "video/film.mp4"}


def test_a_key_that_is_no_path_below_the_folder_of_copies_is_not_listed(s3_place: S3Place, tmp_path: Path):
    home = S3Home(s3_place.section, tmp_path / "cache")
    odd = [f"{tmp_path}/mine", "../mine", "a/../../mine", "a//b", "a/./b", "folder/"]
    for key in (*odd, "a/..b"):
        s3_place.client.put_object(Bucket=s3_place.section.bucket, Key=s3_place.section.prefix + key, Body=b"x")
    assert [entry.key for entry in home.list("")] == ["a/..b"]


def test_a_probe_that_is_killed_leaves_what_is_forgotten(home: S3Home):
    left = f".probe-{'0' * 32}"
    for key in (left, ".probe-of-somebody"):
        home.put(key, b"first")
    assert [entry.key for entry in home.abandoned(0)] == [left] and home.abandoned(1000) == []
    home.forget([left])
    assert home.abandoned(0) == [] and [entry.key for entry in home.list("")] == [".probe-of-somebody"]


@pytest.mark.parametrize("seed", range(3))
def test_with_three_requests_of_ten_going_wrong_all_ends_right(
    home: S3Home, s3_place: S3Place, proxy: FaultyProxy, tmp_path: Path, seed: int
):
    key = ArtifactKey("tiny", "train", "a" * 32)
    store = Store(home)
    proxy.plan = seeded(seed)
    store.check_writable()
    record = publish(store, key)
    other = Store(S3Home(s3_place.at(proxy.endpoint), tmp_path / "other"))
    assert contents(other.open(key)) == FILES and other.record(key) == record and other.lease(key).state() == "released"
    other.delete(other.inventory()[0])
    proxy.plan = None
    assert home.list("") == [] and home.abandoned(0) == []
    assert sum(count for fault, count in proxy.done.items() if fault != "ok") >= 5


@pytest.mark.parametrize("fault", ["503", "lost"])
def test_a_server_that_only_fails_is_told_in_bounded_time(home: S3Home, proxy: FaultyProxy, fault: str):
    proxy.plan = lambda method, path: fault
    started_s = time.monotonic()
    with pytest.raises(TryAgainError) as caught:
        home.get("a/b")
    assert caught.value.exit_code == 75 and caught.value.where == home.place("a/b")
    assert time.monotonic() - started_s < 20 and proxy.done[fault] == s3_home.ATTEMPTS


def test_a_body_that_breaks_off_is_asked_for_again(s3_place: S3Place, tmp_path: Path):
    content = b"x" * 100_000
    S3Home(s3_place.section, tmp_path).put("a/b", content)
    with FaultyProxy(s3_place.section.endpoint_url, once("short", "GET", "a/b")) as proxy:
        assert S3Home(s3_place.at(proxy.endpoint), tmp_path).get("a/b") == content
        proxy.plan = once("short", "GET", "a/b")
        assert S3Home(s3_place.at(proxy.endpoint), tmp_path).fetch("a/b").read_bytes() == content
        assert proxy.done["short"] == 2


def test_no_server_at_all_is_worth_trying_again(s3_place: S3Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(s3_home, "ATTEMPTS", 2)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, but nobody listens
        home = S3Home(s3_place.at(f"http://127.0.0.1:{nobody.getsockname()[1]}"), tmp_path)
        with pytest.raises(TryAgainError, match="cannot list") as caught:
            home.list("")
    assert "endpoint_url" in caught.value.fix


@only_moto
def test_a_server_that_would_let_two_write_the_same_is_refused(s3_place: S3Place, tmp_path: Path):
    with FaultyProxy(s3_place.section.endpoint_url, forgets=("if-none-match",)) as old:
        with pytest.raises(ArtifactError, match="two runs could write the same artifact"):
            S3Home(s3_place.at(old.endpoint), tmp_path).check_writable()
        old.plan = once("501", "PUT", ".probe-")
        with pytest.raises(ArtifactError, match="knows no conditional writes"):
            S3Home(s3_place.at(old.endpoint), tmp_path).check_writable()
    assert S3Home(s3_place.section, tmp_path).list("") == []


def test_no_such_bucket_is_a_wrong_configuration(s3_place: S3Place, tmp_path: Path):
    section = s3_place.section.model_copy(update={"uri": "s3://raysd-no-such-bucket-0f3a/x"})
    home = S3Home(section, tmp_path)
    for ask in (home.exists, home.check_writable, home.now_s, lambda: home.get("a"), lambda: home.list(""), lambda: home.abandoned(0)):
        with pytest.raises(ExperimentError, match="no such bucket") as caught:
            ask()
        assert caught.value.exit_code == 64 and caught.value.where == f"store: {section.text()}"


@contextlib.contextmanager
def keys_are_checked(endpoint: str) -> Iterator[None]:
    """moto's server checks keys and policies inside; outside it lets everybody in."""

    def let_in(requests: bytes) -> None:
        request = urllib.request.Request(f"{endpoint}/moto-api/reset-auth", data=requests, headers={"Content-Type": "text/plain"})
        urllib.request.urlopen(request).close()

    let_in(b"0")
    try:
        yield
    finally:
        let_in(b"inf")


@only_moto
def test_keys_that_nobody_gave_out_and_keys_that_may_do_nothing_are_told_apart(
    s3_place: S3Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import boto3

    S3Home(s3_place.section, tmp_path).put("a/b", b"x")
    iam = boto3.client("iam", endpoint_url=s3_place.section.endpoint_url)
    iam.create_user(UserName=tmp_path.name)
    given = iam.create_access_key(UserName=tmp_path.name)["AccessKey"]
    for code, key_id, secret in (
        ("InvalidAccessKeyId", "AKIANOBODY", "nothing"),
        ("AccessDenied", given["AccessKeyId"], given["SecretAccessKey"]),
    ):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key_id)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        home = S3Home(s3_place.section, tmp_path)
        with keys_are_checked(s3_place.section.endpoint_url):
            for ask, operation in (
                (lambda home=home: home.get("a/b"), "GetObject"),
                (home.check_writable, "ListObjectsV2"),
                (lambda home=home: home.fetch("a/b"), "ListObjectsV2"),
            ):
                with pytest.raises(ArtifactError, match=f"{operation}.*{code}") as caught:
                    ask()
                assert caught.value.where.startswith(s3_place.section.uri) and "s3:GetObject" in caught.value.fix
    assert [entry.key for entry in S3Home(s3_place.section, tmp_path).list("")] == ["a/b"]


def test_no_credentials_and_unknown_profiles_say_where_boto3_looks(s3_place: S3Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ArtifactError, match="Partial credentials") as caught:
        S3Home(s3_place.section, tmp_path).list("")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(ArtifactError, match="Unable to locate credentials") as caught:
        S3Home(s3_place.section, tmp_path).list("")
    assert "AWS_SECRET_ACCESS_KEY" in caught.value.fix and "AWS_PROFILE" in caught.value.fix
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ArtifactError, match="nobody"):
        S3Home(s3_place.section, tmp_path)


def test_an_address_in_the_environment_that_is_none_is_a_wrong_configuration(
    s3_place: S3Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "localhost:9000")
    with pytest.raises(ExperimentError, match="localhost:9000"):
        S3Home(s3_place.section.model_copy(update={"endpoint_url": None}), tmp_path)


@pytest.mark.parametrize(
    ("code", "status", "kind", "words"),
    [
        ("NoSuchBucket", 404, ExperimentError, "correct its name"),
        ("PermanentRedirect", 301, ExperimentError, "region=eu-west-1"),
        ("AuthorizationHeaderMalformed", 400, ExperimentError, "region=eu-west-1"),
        ("ExpiredToken", 400, ArtifactError, "renew"),
        ("ExpiredTokenException", 400, ArtifactError, "renew"),
        ("InvalidToken", 400, ArtifactError, "renew"),
        ("TokenRefreshRequired", 400, ArtifactError, "renew"),
        ("RequestTimeTooSkewed", 403, ArtifactError, "set the clock"),
        ("SignatureDoesNotMatch", 403, ArtifactError, "use credentials that may"),
        ("403", 403, ArtifactError, "use credentials that may"),
        ("QuotaExceeded", 403, ArtifactError, "free space"),
        ("404", 404, ArtifactError, "run the stage again"),
        ("SlowDown", 503, TryAgainError, "run again"),
        ("InternalError", 500, TryAgainError, "run again"),
        ("Strange", 599, TryAgainError, "run again"),
        ("TooManyRequests", 429, TryAgainError, "run again"),
        ("RequestTimeout", 400, TryAgainError, "run again"),
        ("EntityTooLarge", 400, ArtifactError, "check the settings"),
    ],
)
def test_every_answer_has_its_error(code: str, status: int, kind: type[RaysdError], words: str):
    from botocore.exceptions import ClientError

    answer = {"Error": {"Code": code, "Message": "said", "Region": "eu-west-1"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = s3_errors.explain(ClientError(answer, "PutObject"), "write here", "s3://b/here", "s3://b")
    assert type(error) is kind and words in error.fix
    assert error.where == ("store: s3://b" if kind is ExperimentError else "s3://b/here")


def test_the_names_of_exceptions_are_botocores():
    import boto3.exceptions
    import botocore.exceptions

    names = s3_errors.EXPIRED_KINDS | s3_errors.CREDENTIAL_KINDS | s3_errors.SETTING_KINDS | s3_errors.PASSING_KINDS
    known = {*vars(botocore.exceptions), *vars(boto3.exceptions), "TimeoutError"}
    assert names <= known
    assert all(re.fullmatch(r"\w+", name) for name in names)


def test_a_cache_that_cannot_be_written_is_named_with_the_variable_that_moves_it(s3_place, tmp_path):
    (tmp_path / "file").touch()
    store = Store(S3Home(s3_place.section, tmp_path / "file" / "cache"))
    key = ArtifactKey("tiny", "train", "a" * 32)
    with pytest.raises(ArtifactError, match="copy on this machine") as caught, store.log(key, 1):
        pass
    assert "RAYSD_CACHE" in caught.value.fix
    with pytest.raises(ArtifactError, match="copy on this machine"), store.work_on(key, {}) as work:
        work.clear()
