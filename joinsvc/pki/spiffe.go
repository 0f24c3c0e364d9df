package pki

import (
	"fmt"
	"net/url"
	"regexp"

	"github.com/better-compute/join-operator/api/wire"
)

var (
	// A trust domain's name (SPIFFE-ID section 2.1).
	trustDomainPattern = regexp.MustCompile(`^[a-z0-9._-]{1,255}$`)
	// Tenants and node ids are DNS labels (RFC 1123 section 2.1).
	labelPattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
)

// ID is the SPIFFE id of a node's certificate:
// spiffe://<trustDomain>/tenant/<tenant>/<role>/<nodeID>.
func ID(trustDomain, tenant string, role wire.Role, nodeID string) (*url.URL, error) {
	switch {
	case !trustDomainPattern.MatchString(trustDomain):
		return nil, fmt.Errorf("%q is not the name of a trust domain", trustDomain)
	case !labelPattern.MatchString(tenant):
		return nil, fmt.Errorf("tenant %q is not a DNS label", tenant)
	case !role.Valid():
		return nil, fmt.Errorf("%q is not a role", role)
	case !labelPattern.MatchString(nodeID):
		return nil, fmt.Errorf("node id %q is not a DNS label", nodeID)
	}
	return &url.URL{Scheme: "spiffe", Host: trustDomain, Path: "/tenant/" + tenant + "/" + string(role) + "/" + nodeID}, nil
}
