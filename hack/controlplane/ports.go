package controlplane

import (
	"fmt"
	"math/rand/v2"
	"net"
)

// FreePorts returns n loopback ports that nobody listens on. They lie below the
// range from which the kernel takes the ports of outgoing connections, so that
// nobody is given one between now and its use.
func FreePorts(n int) ([]int, error) {
	ports := make([]int, 0, n)
	seen := map[int]bool{}
	for tries := 0; len(ports) < n; tries++ {
		if tries > 1000 {
			return nil, fmt.Errorf("found only %d of %d free loopback ports", len(ports), n)
		}
		port := 20000 + rand.IntN(12000)
		if seen[port] {
			continue
		}
		seen[port] = true
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		l.Close()
		ports = append(ports, port)
	}
	return ports, nil
}
