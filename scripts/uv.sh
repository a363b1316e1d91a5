# Sourced by other scripts in the root of the checkout. Sets `uv` to the program, in the version of requirements/uv.txt
# and installed by pip into .uv. Makes uv use the package sources that pip is configured for, since uv does not read
# pip's configuration. A UV_ variable of the caller's is stronger, also an empty one.

uv=.uv/bin/uv
pinned=$(sed -n 's/^uv==\([^ ]*\).*/\1/p' requirements/uv.txt)
if [ "$(.uv/bin/python -m uv --version 2> /dev/null | cut -d ' ' -f 2)" != "$pinned" ]; then
  printf '== set-up: install uv %s into .uv\n' "$pinned"
  rm -rf .uv
  "${PYTHON:-python3}" -m venv .uv
  .uv/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements/uv.txt
fi

settings=$(.uv/bin/python -m pip config list)
while read -r setting variable separator; do
  # Of several lines, the first is of a PIP_ variable. Blanks or ends of lines stand between the values of a list.
  value=$(sed -nE "s/^(:env:|global|install)\.$setting='(.*)'\$/\2/p" <<< "$settings" | head -n 1)
  value=$(xargs <<< "${value//\\n/ }")
  if [ -n "$value" ] && [ -z "${!variable+given}" ]; then
    export "$variable=${value// /${separator:- }}"
  fi
done << 'END'
index-url UV_DEFAULT_INDEX
extra-index-url UV_EXTRA_INDEX_URL
find-links UV_FIND_LINKS ,
trusted-host UV_INSECURE_HOST
cert SSL_CERT_FILE
END
# Like pip: the newest version that any of the sources has.
export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
