#!/usr/bin/env bash
# Installs the Debian packages that tests and the dev system need: only those that
# are missing, as root or with sudo.
set -euo pipefail

# package and a file that only it brings
needed=(
  "postgresql /usr/lib/postgresql/*/bin/initdb"
  "swtpm /usr/bin/swtpm"
  "swtpm-tools /usr/bin/swtpm_setup"
  "tpm2-tools /usr/bin/tpm2"
  "openssl /usr/bin/openssl"
  "gcc /usr/bin/gcc" # the race detector links with it
  "libc6-dev /usr/include/stdlib.h"
)
missing=()
for line in "${needed[@]}"; do
  read -r package file <<<"$line"
  compgen -G "$file" >/dev/null || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

sudo=
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || { echo "run as root, or install: ${missing[*]}" >&2; exit 1; }
  sudo=sudo
fi
begun=$SECONDS
echo "==> installing Debian packages: ${missing[*]}"
# A cluster of the package's own would only take a port and memory.
if [ ! -e /etc/postgresql-common/createcluster.conf ]; then
  $sudo mkdir -p /etc/postgresql-common
  echo 'create_main_cluster = false' | $sudo tee /etc/postgresql-common/createcluster.conf >/dev/null
fi
$sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq update
$sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null
echo "==> packages installed ($((SECONDS - begun)) s)"
