#!/usr/bin/env bash
# Copies into the chart what it installs as it stands in config/: a chart cannot read
# files outside its folder. test/manifests fails where the copies are old.
set -euo pipefail
cd "$(dirname "$0")/.."
to=charts/join-operator/files
rm -rf "$to"
mkdir -p "$to"/{crds,policies,rbac,certmanager,stamp}
cp config/crd/bases/*.yaml "$to/crds/"
cp config/policies/*.yaml "$to/policies/"
cp config/rbac/*.yaml "$to/rbac/"
cp config/certmanager/issuers-policy.yaml "$to/certmanager/"
cp config/components/stamp-decisions/joinrequest-stamp.yaml "$to/stamp/"
find "$to" -name kustomization.yaml -delete
