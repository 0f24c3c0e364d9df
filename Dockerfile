# One image with one program per role. One image: what is released, scanned and
# mirrored is one thing, and no two roles are ever of different releases by mistake.
# One program each: a process holds the code of its own role alone, so that the
# gateway, which faces the internet, has neither a database driver nor a Kubernetes
# client in it to be turned against us.
#
# docker build --build-arg VERSION=v0.1.0 .
FROM --platform=$BUILDPLATFORM golang:1.26 AS build
ARG TARGETOS TARGETARCH
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
# Static and reproducible: no cgo, no paths and no times of the machine that builds.
RUN mkdir /out && for program in manager joinsvc gateway keys; do \
      CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH \
      go build -trimpath -buildvcs=false -ldflags="-s -w -buildid=" -o /out/ ./cmd/$program || exit 1; \
    done

# Nothing but the programs and the public CAs, by which Postgres may be known: no
# shell, no package manager, no user but a number.
FROM scratch
ARG VERSION=dev
LABEL org.opencontainers.image.title="join-operator" \
      org.opencontainers.image.source="https://github.com/better-compute/join-operator" \
      org.opencontainers.image.version="$VERSION"
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /out/ /
USER 65532:65532
# No entry point: every workload says which of the programs it is.
