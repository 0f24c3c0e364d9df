#!/usr/bin/env bash
# Runs every test of the product with the race detector. Arguments go to "go test";
# without any, all packages run.
set -euo pipefail
cd "$(dirname "$0")/.."
export KUBEBUILDER_ASSETS=$PWD/.bin
[ $# -gt 0 ] || set -- ./...
begun=$SECONDS
log=$(mktemp)
trap 'rm -f "$log"' EXIT
echo "==> go vet"
go vet ./...
echo "==> go vet done ($((SECONDS - begun)) s); go test -race, on one shared Postgres"
status=0
# One Postgres for all packages; each test still has its own database.
go run ./test/pgtest/shared go test -race -timeout 20m "$@" 2>&1 | tee "$log" || status=$?
# The summary last, so that nobody has to scroll for it. || true: grep finds nothing.
echo
echo "==> summary ($((SECONDS - begun)) s)"
grep -E '^(ok|FAIL|---)[[:space:]]' "$log" || true
packages() { grep -cE "^$1[[:space:]]+github.com" "$log" || true; }
echo "$(packages ok) passed, $(packages FAIL) failed"
exit "$status"
