"""The writer of files, under the name by which the bench and its commands import it."""

from gpipe_bench.files import check_writable, json_text, staging, write_files

__all__ = ["check_writable", "json_text", "staging", "write_files"]
