package jointoken

import (
	"context"
	"crypto/subtle"
	"fmt"

	"github.com/better-compute/join-operator/attestors"
)

// version of the verifier.
const version = "1"

// New is the attestor: its id and type are [attestors.DefaultID].
func New() *attestors.Attestor {
	a, err := attestors.Define(attestors.Spec{
		ID: attestors.DefaultID, Version: version,
		Roles:  []attestors.Role{attestors.RoleNode, attestors.RoleSite, attestors.RoleRamdisk},
		Verify: verify,
	})
	if err != nil {
		panic(err) // a constant spec
	}
	return a
}

// verify admits whoever knows a token that is in force into the token's own
// tenant, pool and site. What else stands between a token and a node (expect,
// uses, enrolled hardware, approval) is the service's to check.
func verify(ctx context.Context, ev attestors.Evidence, jc *attestors.JoinContext) (attestors.Outcome, error) {
	if jc.Token == "" {
		return nil, attestors.Refuse("missing").Because("the machine sent no token")
	}
	if len(ev.Payload) > 0 || len(ev.State) > 0 {
		return nil, attestors.Refuse("evidence").Because("a token comes without evidence and answers no challenge")
	}
	token, err := Parse(jc.Token)
	if err != nil {
		return nil, attestors.Refuse("malformed").Because("what the machine sent is no token: it was cut, changed or mistyped")
	}
	row, err := jc.Tokens.Token(ctx, token.ID)
	if err != nil {
		return nil, err
	}
	if !known(token, row) {
		return nil, attestors.Refuse("unknown").Because("no JoinToken has the id %s, or its secret is another's", token.ID)
	}
	name := fmt.Sprintf("JoinToken %s/%s", row.Tenant, row.Name)
	subject := Subject(token.ID, jc.CSRSHA256)
	switch {
	case !row.RevokedAt.IsZero():
		return nil, attestors.Refuse("revoked").InTenant(row.Tenant).Because("%s was deleted: make another one", name)
	case row.Role != jc.Role:
		return nil, attestors.Refuse("role").InTenant(row.Tenant).
			Because("%s is for the role %s, the machine asks for %s", name, row.Role, jc.Role)
	case !row.ExpiresAt.IsZero() && !jc.FirstSeen(subject).Before(row.ExpiresAt):
		return nil, attestors.Refuse("expired").InTenant(row.Tenant).
			Because("%s expired at %s: move its expiry or make another one", name, row.ExpiresAt.UTC().Format("2006-01-02T15:04:05Z"))
	}
	return &attestors.Admit{
		Subject: subject,
		Tenant:  row.Tenant, Pool: row.Pool, Site: row.Site, Role: row.Role,
		TokenID: token.ID,
	}, nil
}

// Subject is what a token join is kept by: the token's id, NUL, the CSR's hash.
// It is not proved: two machines with one token stand beside each other.
func Subject(tokenID string, csr [32]byte) []byte {
	return append([]byte(tokenID+"\x00"), csr[:]...)
}

// known compares in constant time, also where there is no such token, so that
// time does not tell ids apart.
func known(t Token, row *attestors.TokenRow) bool {
	var tenant string
	var want [32]byte
	if row != nil {
		tenant, want = row.Tenant, row.SecretSHA256
	}
	got := t.SecretSHA256(tenant)
	return subtle.ConstantTimeCompare(got[:], want[:]) == 1 && row != nil
}
