#!/usr/bin/env bash
# Installs the headless browser that the tests of the report open its page in: Debian's and Ubuntu's chromium, as root.
# Elsewhere, or where it cannot be had, it says so and ends well: those tests are skipped then, with the reason.
set -euo pipefail

for browser in chromium chromium-browser google-chrome google-chrome-stable chrome; do
  if command -v "$browser" > /dev/null; then
    exit 0
  fi
done
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
  echo "no browser here, and none can be installed (needs root and apt-get): tests of the report's page are skipped" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } > /dev/null 2>&1; then
  echo "no browser here, and apt-get could not install chromium: tests of the report's page are skipped" >&2
fi
