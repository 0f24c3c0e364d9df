# "make" alone prints what there is. Every target installs what it needs.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

MODULE := github.com/better-compute/join-operator
export GOFLAGS := -buildvcs=false
BIN := $(CURDIR)/.bin
# One binary per process; hack/ has the launcher and the load tool.
PRODUCT := $(notdir $(filter-out cmd/internal,$(patsubst %/,%,$(wildcard cmd/*/))))
FUZZTIME ?= 20s

.PHONY: help
help: ## print the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: tools
tools: ## install and build what tests and the dev system need (first time: minutes)
	@hack/install-packages.sh
	@hack/build-cluster.sh

.PHONY: build
build: ## build the product's programs, the launcher and the load tool into .bin
	@for p in $(PRODUCT); do CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o $(BIN)/$$p ./cmd/$$p; done
	@for p in dev joinload; do go build -o $(BIN)/$$p ./hack/$$p; done

.PHONY: generate
generate: ## generate deepcopy methods
	@hack/install-tools.sh controller-gen
	$(BIN)/controller-gen object paths=./api/...

.PHONY: manifests
manifests: ## generate the definitions of the custom resources, and the chart's copies of config/
	@hack/install-tools.sh controller-gen
	$(BIN)/controller-gen crd paths=./api/... output:crd:dir=config/crd/bases
	@charts/sync.sh

.PHONY: docs
docs: ## generate the reference of the custom resources
	@hack/install-tools.sh crd-ref-docs
	$(BIN)/crd-ref-docs --source-path=api --config=hack/crd-ref-docs.yaml --renderer=markdown --output-path=docs/api.md

.PHONY: fmt
fmt: ## format the code
	gofmt -w $$(git ls-files -- '*.go')

.PHONY: lint
lint: ## formatting, vet, golangci-lint (with the import arrows)
	@hack/install-tools.sh golangci-lint
	@test -z "$$(gofmt -l $$(git ls-files -- '*.go'))" || { gofmt -l $$(git ls-files -- '*.go'); exit 1; }
	$(BIN)/golangci-lint run ./...

.PHONY: verify
verify: generate manifests docs lint ## generated files are fresh, modules tidy, no known vulnerability
	@hack/install-tools.sh govulncheck
	go mod tidy -diff
	cd hack/devcluster && go mod tidy -diff
	git diff --exit-code -- api config charts docs
	$(BIN)/govulncheck ./... || { echo "govulncheck failed: a finding, or its database cannot be reached from here"; exit 1; }

.PHONY: test
test: tools build ## every test, with -race, on real servers; make test ARGS=./joinsvc/... for some
	@hack/install-tools.sh helm
	@hack/test.sh $(ARGS)

.PHONY: fuzz
fuzz: ## run each fuzz target for FUZZTIME (20s)
	@grep -rlE --include='*_test.go' '^func Fuzz' . | while read -r file; do \
	  for f in $$(grep -oE '^func Fuzz[A-Za-z0-9_]+' $$file | cut -d' ' -f2); do \
	    echo "==> $$f"; go test "$$(dirname $$file)" -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZTIME); done; done

.PHONY: dev-up
dev-up: tools build ## bring the whole system up on this machine and keep it
	@$(BIN)/dev up

.PHONY: dev-down
dev-down: ## stop it and throw its data away
	@if [ -x $(BIN)/dev ]; then $(BIN)/dev down; fi

.PHONY: demo
demo: tools build ## bring it up in a folder of its own, show the main story, take it down
	@$(BIN)/dev demo --dir .dev/demo

.PHONY: bench
bench: dev-up ## measure joins on the dev system; the table goes into docs/performance.md
	@hack/bench.sh
