package wire

import (
	"crypto/x509"
	"encoding/json"
	"fmt"
)

// Confirm is the body of POST /v1/confirm: the machine says that it has stored
// what it got. Signature is by the certificate's key over [ConfirmStatement].
type Confirm struct {
	Certificate []byte
	Signature   []byte
}

type confirmJSON struct {
	Protocol    int    `json:"protocol"`
	Certificate string `json:"certificate"`
	Signature   string `json:"signature"`
}

// MarshalJSON writes the body as a machine sends it.
func (c *Confirm) MarshalJSON() ([]byte, error) {
	return json.Marshal(confirmJSON{Protocol, EncodeBase64(c.Certificate), EncodeBase64(c.Signature)})
}

// DecodeConfirm reads a confirmation strictly. Every error is a *FieldError.
func DecodeConfirm(body []byte) (*Confirm, error) {
	var in confirmJSON
	if err := decodeStrict(body, &in); err != nil {
		return nil, err
	}
	if in.Protocol != Protocol {
		return nil, &FieldError{"protocol", fmt.Sprintf("must be %d", Protocol)}
	}
	var c Confirm
	var err error
	if c.Certificate, err = decodeField("certificate", in.Certificate); err != nil {
		return nil, err
	}
	if _, err := x509.ParseCertificate(c.Certificate); err != nil {
		return nil, &FieldError{"certificate", "is not a DER certificate"}
	}
	if c.Signature, err = decodeField("signature", in.Signature); err != nil {
		return nil, err
	}
	return &c, nil
}
