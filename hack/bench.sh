#!/usr/bin/env bash
# Measures joins on the running dev system and keeps the tables in
# docs/performance.md, between its two marks.
set -euo pipefail
cd "$(dirname "$0")/.."
. .dev/env
kubectl create namespace load --dry-run=client -o yaml | kubectl apply -f - >/dev/null
kubectl label --overwrite namespace load join.better-compute.dev/tenant=true >/dev/null
kubectl apply -f - >/dev/null <<YAML
apiVersion: join.better-compute.dev/v1alpha1
kind: FleetPool
metadata: {name: default, namespace: load}
spec: {nodeObjects: None}
YAML
kubectl wait -n load fleetpool/default --for=condition=Ready --timeout=30s >/dev/null
table=$(mktemp)
trap 'rm -f "$table" "$table.new"' EXIT
{
  echo "Measured $(date -u +%F) on $(nproc) cores ($(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)), $(free -g | awk '/^Mem/ {print $2}') GiB, with $(postgres --version 2>/dev/null || /usr/lib/postgresql/*/bin/postgres --version); load tool and all processes on the same machine."
  for connections in 8 32; do
    echo
    echo "One token, $connections connections:"
    echo
    .bin/joinload --markdown --rounds 3 --concurrency "$connections" --joins 5000
  done
  echo
  echo "One token against a token a join, in turns:"
  echo
  .bin/joinload --markdown --compare --rounds 3 --concurrency 8 --joins 5000
} | tee "$table"
doc=docs/performance.md
[ -e "$doc" ] || printf '# Performance\n\n<!-- bench begin -->\n<!-- bench end -->\n' >"$doc"
awk -v table="$table" '
  /<!-- bench end -->/ {skip = 0}
  !skip
  /<!-- bench begin -->/ {while ((getline line < table) > 0) print line; skip = 1}
' "$doc" >"$table.new"
cp "$table.new" "$doc"
