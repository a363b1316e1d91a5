#!/usr/bin/env bash
# Installs npm's package pyodide, Python for web pages, with which the page of the playground runs without a server.
#
#   scripts/install_pyodide.sh           below the user's cache, where the tests look for it
#   scripts/install_pyodide.sh FOLDER    into a folder, for pages that are published
#
# The package is one archive without dependencies of its own that a page would need; its version and its SHA-512 are
# pinned here. Safe to interrupt and to run again. Where the archive cannot be had (no npm, no network), the first form
# says so and ends well: tests that need it are skipped then, with the reason. The second form fails.
set -euo pipefail

version=314.0.7
sha512=d18bd7c4485f11da4b7dbfd790cd8114078c44eab488c517d9bcf31fda4eb6dc8c716930abe1db139bb2b860fcd8b37bcb6abe48dbe2ffa579244b0e943d91d4
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/gpipe_bench/npm/node_modules/pyodide}

give_up() {
  echo "pyodide $version cannot be installed: $1; tests of the page with Python in it are skipped" >&2
  if [ -n "$asked" ]; then exit 1; else exit 0; fi
}

asked=${1:-}
if [ "$(cat "$folder/.made-from" 2> /dev/null)" = "$sha512" ]; then
  exit 0
fi
if [ -e "$folder" ] && [ ! -e "$folder/pyodide.mjs" ]; then
  give_up "$folder is another folder"
fi
command -v npm > /dev/null || give_up 'npm is not in PATH'
mkdir -p "$(dirname "$folder")" 2> /dev/null || give_up "$(dirname "$folder") cannot be written"
new=$(mktemp -d "$folder.XXXXXX") || give_up "$(dirname "$folder") cannot be written"
trap 'rm -rf "$new"' EXIT
archive=$new/pyodide-$version.tgz
(cd "$new" && timeout 180 npm pack --silent --ignore-scripts --fetch-retries=1 "pyodide@$version") > /dev/null 2>&1 ||
  give_up 'npm could not download it'
echo "$sha512  $archive" | sha512sum --check --status || give_up 'the archive has another SHA-512 than the pinned one'
tar -xzf "$archive" -C "$new"
echo "$sha512" > "$new/package/.made-from"
rm -rf "$folder"
mv "$new/package" "$folder"
