package wire

import (
	"encoding/json"
	"fmt"
)

// Renew is the body of POST /v1/renew: a certificate that still runs is replaced
// by one for another key. Certificate, CSR and Signature are required; the rest
// belongs to the second round of a certificate that makes a statement about its
// node's key.
type Renew struct {
	// Certificate is the DER of the leaf that is renewed.
	Certificate []byte
	// CSR is a DER PKCS#10 request (RFC 2986). Only its public key is used.
	CSR []byte
	// Signature is by the certificate's key over [RenewStatement].
	Signature []byte
	// KeyID names the sealing key of Sealed; both are present or neither. The
	// sealed part is bound by [SealAAD] to [RenewAttestor], the certificate's role
	// and the CSR; opened it is a [Sealed].
	KeyID  string
	Sealed []byte
	// HasSealed tells an empty sealed part (a refusal) from an absent one.
	HasSealed bool
	// State is what a challenge handed out, as it was handed out.
	State []byte
}

type renewJSON struct {
	Protocol    int     `json:"protocol"`
	Certificate string  `json:"certificate"`
	CSR         string  `json:"csr"`
	Signature   string  `json:"signature"`
	KeyID       *string `json:"kid,omitempty"`
	Sealed      *string `json:"sealed,omitempty"`
	State       *string `json:"state,omitempty"`
}

// MarshalJSON writes the body as a machine sends it.
func (r *Renew) MarshalJSON() ([]byte, error) {
	out := renewJSON{
		Protocol: Protocol, Certificate: EncodeBase64(r.Certificate), CSR: EncodeBase64(r.CSR), Signature: EncodeBase64(r.Signature),
	}
	if r.KeyID != "" || r.HasSealed || len(r.Sealed) > 0 {
		s := EncodeBase64(r.Sealed)
		out.KeyID, out.Sealed = &r.KeyID, &s
	}
	if len(r.State) > 0 {
		s := EncodeBase64(r.State)
		out.State = &s
	}
	return json.Marshal(out)
}

// DecodeRenew reads a renewal as strictly as [DecodeJoin] reads a join. Neither
// the certificate nor the CSR is parsed. Every error is a *FieldError and means
// INVALID_INPUT.
func DecodeRenew(body []byte) (*Renew, error) {
	var in renewJSON
	if err := decodeStrict(body, &in); err != nil {
		return nil, err
	}
	if in.Protocol != Protocol {
		return nil, &FieldError{"protocol", fmt.Sprintf("must be %d", Protocol)}
	}
	r := &Renew{}
	for _, f := range []struct {
		name, text string
		into       *[]byte
	}{{"certificate", in.Certificate, &r.Certificate}, {"csr", in.CSR, &r.CSR}, {"signature", in.Signature, &r.Signature}} {
		b, err := decodeField(f.name, f.text)
		if err != nil {
			return nil, err
		}
		if len(b) == 0 {
			return nil, &FieldError{f.name, "is required"}
		}
		*f.into = b
	}
	var err error
	if r.KeyID, r.Sealed, r.HasSealed, err = decodeSealedFields(in.KeyID, in.Sealed); err != nil {
		return nil, err
	}
	if in.State != nil {
		if r.State, err = decodeField("state", *in.State); err != nil {
			return nil, err
		}
	}
	return r, nil
}
