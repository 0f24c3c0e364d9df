#!/usr/bin/env bash
# Installs the named Go tools into .bin, each in the version that hack/versions.env
# pins; one that is there in that version stays.
set -euo pipefail
cd "$(dirname "$0")/.."
. hack/versions.env
bin=$PWD/.bin
mkdir -p "$bin"

install() { # name, package, version
  local have
  have=$(go version -m "$bin/$1" 2>/dev/null | awk '$1 == "mod" {print $3}') || true
  [ "$have" != "$3" ] || return 0
  local begun=$SECONDS
  echo "==> installing $1 $3"
  GOBIN=$bin GOFLAGS=-buildvcs=false go install "$2@$3"
  echo "==> $1 installed ($((SECONDS - begun)) s)"
}

for tool in "$@"; do
  case $tool in
    controller-gen) install $tool sigs.k8s.io/controller-tools/cmd/controller-gen "$CONTROLLER_GEN_VERSION" ;;
    crd-ref-docs) install $tool github.com/elastic/crd-ref-docs "$CRD_REF_DOCS_VERSION" ;;
    golangci-lint) install $tool github.com/golangci/golangci-lint/v2/cmd/golangci-lint "$GOLANGCI_LINT_VERSION" ;;
    helm) install $tool helm.sh/helm/v4/cmd/helm "$HELM_VERSION" ;;
    govulncheck) install $tool golang.org/x/vuln/cmd/govulncheck "$GOVULNCHECK_VERSION" ;;
    kubeconform) install $tool github.com/yannh/kubeconform/cmd/kubeconform "$KUBECONFORM_VERSION" ;;
    *) echo "unknown tool $tool" >&2; exit 1 ;;
  esac
done
