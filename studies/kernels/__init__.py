"""Operators that were timed on an H200, beside what the law of the profile ``h200`` says of them."""
