# One image with one binary for each process, not one binary with subcommands: a
# process links the least it needs, so the gateway has neither the database driver
# nor a Kubernetes client in its memory to be misused.
FROM --platform=$BUILDPLATFORM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY api api
COPY attestors attestors
COPY agent agent
COPY joinsvc joinsvc
COPY controllers controllers
COPY config/policies config/policies
COPY cmd cmd
ARG TARGETOS TARGETARCH
RUN mkdir /out && for p in manager joinsvc gateway keys; do \
      CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH go build -trimpath -ldflags "-s -w" -o /out/$p ./cmd/$p || exit 1; \
    done

# Static binaries need nothing but a user and the time zones that Go brings itself.
FROM scratch
COPY --from=build /out/ /
USER 65532:65532
ENTRYPOINT ["/manager"]
