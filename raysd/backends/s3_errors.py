"""What S3 and boto3 refuse, told as raysd's errors: whose mistake it is, and whether the same call may succeed later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from raysd.errors import ArtifactError, ExperimentError, RaysdError, TryAgainError

EXPIRED = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "RequestExpired"}
REFUSED = {
    "AccessDenied",
    "AccessDeniedException",
    "AllAccessDisabled",
    "AccountProblem",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "Forbidden",
}
ELSEWHERE = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301"}
FULL = {"QuotaExceeded", "XMinioStorageFull"}
ABSENT = {"NoSuchKey", "404"}
PASSING = {
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestTimeout",
    "InternalError",
    "ServiceUnavailable",
    "OperationAborted",
    "ConditionalRequestConflict",
    "NoSuchUpload",
}
"""Codes of what passes; so does every answer of 429 or 5xx. NoSuchUpload: the upload was forgotten while its last part was sent."""

# Exceptions of botocore by their names, since not every version has them all.
EXPIRED_KINDS = {"SSOError", "TokenRetrievalError", "LoginError", "NoAuthTokenError"}
CREDENTIAL_KINDS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "UnknownCredentialError",
    "MetadataRetrievalError",
    "ProfileNotFound",
    "ConfigNotFound",
    "ConfigParseError",
}
SETTING_KINDS = {"ParamValidationError", "NoRegionError", "InvalidRegionError", "InvalidConfigError", "InvalidEndpointConfigurationError"}
PASSING_KINDS = {
    "ConnectionError",
    "TimeoutError",
    "HTTPClientError",
    "IncompleteReadError",
    "ChecksumError",
    "FlexibleChecksumError",
    "RetriesExceededError",
}

NEEDED = "s3:GetObject, PutObject, DeleteObject, AbortMultipartUpload, ListMultipartUploadParts, ListBucket and ListBucketMultipartUploads"


@contextlib.contextmanager
def explained(doing: str, place: str, store: str) -> Iterator[None]:
    """Turns what botocore raises inside into a RaysdError.

    doing: an infinitive. place: the object, as a URL. store: the store, as `--store` takes it.
    """
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except (BotoCoreError, ClientError, Boto3Error, ResponseParserError, ConnectionError, TimeoutError) as err:
        raise explain(err, doing, place, store) from err


def explain(err: Exception, doing: str, place: str, store: str) -> RaysdError:
    """The RaysdError for an exception of botocore or boto3; arguments as in `explained`."""
    from boto3.exceptions import S3UploadFailedError
    from botocore.exceptions import ClientError

    if isinstance(err, S3UploadFailedError) and isinstance(err.__context__, ClientError):
        err = err.__context__  # boto3 wraps the answer in a sentence
    return _of_answer(err, doing, place, store) if isinstance(err, ClientError) else _without_answer(err, doing, place, store)


def code_and_status(err: Exception) -> tuple[str, int]:
    """The code and the HTTP status of a ClientError. An answer to HEAD has no body: its code is the status."""
    return str(err.response.get("Error", {}).get("Code", "")), err.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)


def _of_answer(err: Exception, doing: str, place: str, store: str) -> RaysdError:
    code, status = code_and_status(err)
    said = f"the server refused to {doing} (operation {err.operation_name}): {code} {err.response['Error'].get('Message', '')}".strip()
    if code == "NoSuchBucket":
        return ExperimentError(
            what=f"there is no such bucket: {code}", where=f"store: {store}", fix="create the bucket, or correct its name or endpoint_url"
        )
    if code in ELSEWHERE or status == 301:
        region = err.response["Error"].get("Region") or err.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get(
            "x-amz-bucket-region"
        )
        return ExperimentError(what=said, where=f"store: {store}", fix=f"the bucket is in another region: set region={region or 'NAME'}")
    if code in ("InvalidBucketName", "MethodNotAllowed"):
        return ExperimentError(what=said, where=f"store: {store}", fix="correct the bucket's name, or addressing_style")
    if code in EXPIRED:
        return ArtifactError(
            what=f"the credentials have expired: {said}", where=place, fix="renew them (for SSO: `aws sso login`), then run again"
        )
    if code == "RequestTimeTooSkewed":
        return ArtifactError(
            what=f"this machine's clock is more than 15 minutes off: {said}", where=place, fix="set the clock (NTP), then run again"
        )
    if code in FULL or status == 507:
        return ArtifactError(what=f"the server has no space left: {said}", where=place, fix="free space or raise the quota, then run again")
    if code in REFUSED or status in (401, 403):
        return ArtifactError(what=said, where=place, fix=f"use credentials that may {NEEDED} here")
    if code in ABSENT:
        return ArtifactError(what="the file is missing", where=place, fix="delete its artifact to run the stage again")
    if code == "NotImplemented" or status == 501:
        return ArtifactError(what=said, where=place, fix="use a server that knows this operation of S3")
    if code in PASSING or status == 429 or status >= 500:
        return TryAgainError(what=said, where=place, fix="run again once the server is well")
    return ArtifactError(what=said, where=place, fix="check the settings of the store and of the server")


def _without_answer(err: Exception, doing: str, place: str, store: str) -> RaysdError:
    said = f"cannot {doing}: {' '.join(str(err).split())}"
    kinds = {kind.__name__ for kind in type(err).__mro__}
    if kinds & EXPIRED_KINDS:
        return ArtifactError(
            what=f"the credentials have expired: {said}", where=place, fix="renew them (`aws sso login` or `aws login`), then run again"
        )
    if kinds & CREDENTIAL_KINDS:
        return ArtifactError(
            what=said,
            where=place,
            fix="give boto3 credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile of ~/.aws "
            "(AWS_PROFILE), or a container's or an instance's role; on a cluster, on every node",
        )
    if "SSLError" in kinds and "CERTIFICATE" in str(err).upper():
        return ArtifactError(
            what=said, where=f"store: {store}", fix="name the server's certificates in AWS_CA_BUNDLE, or correct endpoint_url"
        )
    if kinds & SETTING_KINDS:
        return ExperimentError(what=said, where=f"store: {store}", fix="correct the store's bucket, region or endpoint_url")
    if kinds & PASSING_KINDS:
        return TryAgainError(what=said, where=place, fix="check the network and endpoint_url; run again once the server answers")
    return ArtifactError(what=said, where=place, fix="check the settings of the store, and that the server speaks S3's protocol")
