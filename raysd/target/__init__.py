"""The model that is to answer faster: found, converted, described."""

from raysd.target.locate import identify_target, resolve_target, target_fingerprint
from raysd.target.shape import TargetShape, check_plain_logits, read_shape
from raysd.target.tokenizer import eos_token_ids, load_tokenizer, marked_token_ids, special_token_ids

__all__ = ["TargetShape", "check_plain_logits", "eos_token_ids", "identify_target", "load_tokenizer", "marked_token_ids", "read_shape", "resolve_target", "special_token_ids",
           "target_fingerprint"]
