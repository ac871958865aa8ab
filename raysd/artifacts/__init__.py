"""What stages hand to each other: files with a record, found by fingerprint."""

from raysd.artifacts.fingerprint import difference, fingerprint
from raysd.artifacts.folder import FolderHome
from raysd.artifacts.record import FileEntry, Record, describe_files, sha256_of
from raysd.artifacts.store import ArtifactKey, Store

__all__ = ["ArtifactKey", "FileEntry", "FolderHome", "Record", "Store", "describe_files", "difference", "fingerprint", "sha256_of"]
