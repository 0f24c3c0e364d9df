package wire

import "encoding/json"

// X509POP is the evidence of the attestor x509pop: a certificate that this system
// issued, and a signature by its key over [X509POPStatement].
type X509POP struct {
	// Certificate is the leaf's DER.
	Certificate []byte
	Signature   []byte
	// Proof answers the challenge of a certificate that makes a statement about its
	// node's key; only a second round has it.
	Proof []byte
}

type x509popJSON struct {
	Certificate string `json:"certificate"`
	Signature   string `json:"signature"`
	Proof       string `json:"proof,omitempty"`
}

// MarshalJSON writes the evidence as a machine seals it.
func (p *X509POP) MarshalJSON() ([]byte, error) {
	return json.Marshal(x509popJSON{EncodeBase64(p.Certificate), EncodeBase64(p.Signature), EncodeBase64(p.Proof)})
}

// DecodeX509POP reads the evidence strictly; the certificate is not parsed. Its
// errors must not reach a machine: what is wrong here is a refusal.
func DecodeX509POP(evidence []byte) (*X509POP, error) {
	var in x509popJSON
	if err := decodeStrict(evidence, &in); err != nil {
		return nil, err
	}
	var p X509POP
	for _, f := range []struct {
		name, text string
		into       *[]byte
	}{{"certificate", in.Certificate, &p.Certificate}, {"signature", in.Signature, &p.Signature}} {
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
	if p.Proof, err = decodeField("proof", in.Proof); err != nil {
		return nil, err
	}
	return &p, nil
}
