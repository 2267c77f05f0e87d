// Package protocol checks that src/csi/csi.proto says what the published specification says.
//
// It is a module of its own, because the conformance suite beside it may bring a later version of the specification
// than the one that the driver serves.
package protocol

import (
	"context"
	"fmt"
	"testing"

	"github.com/bufbuild/protocompile"
	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// served are the services that the driver answers; whatever they use must be complete.
var served = []protoreflect.Name{"Identity", "Controller", "Node"}

func ours(t *testing.T) protoreflect.FileDescriptor {
	t.Helper()
	compiler := protocompile.Compiler{
		Resolver: protocompile.WithStandardImports(&protocompile.SourceResolver{ImportPaths: []string{"../../../src/csi"}}),
	}
	files, err := compiler.Compile(context.Background(), "csi.proto")
	if err != nil {
		t.Fatalf("src/csi/csi.proto does not compile: %v", err)
	}
	return files[0]
}

// published finds the specification's file through one of its messages.
func published() protoreflect.FileDescriptor {
	return (&csi.ProbeRequest{}).ProtoReflect().Descriptor().ParentFile()
}

// facts are the lines that two equal protocols share: one for each method, field and enum value that `services` reach.
func facts(t *testing.T, file protoreflect.FileDescriptor, services []protoreflect.Name) map[string]bool {
	t.Helper()
	all := map[string]bool{fmt.Sprintf("package %s, syntax %s", file.Package(), file.Syntax()): true}
	seen := map[protoreflect.FullName]bool{}
	var message func(protoreflect.MessageDescriptor)
	enum := func(e protoreflect.EnumDescriptor) {
		for i := range e.Values().Len() {
			v := e.Values().Get(i)
			all[fmt.Sprintf("enum %s: %s = %d", e.FullName(), v.Name(), v.Number())] = true
		}
	}
	message = func(m protoreflect.MessageDescriptor) {
		if seen[m.FullName()] {
			return
		}
		seen[m.FullName()] = true
		all[fmt.Sprintf("message %s", m.FullName())] = true
		for i := range m.Fields().Len() {
			f := m.Fields().Get(i)
			kind := f.Kind().String()
			if f.Message() != nil {
				kind = string(f.Message().FullName())
				message(f.Message())
			}
			if f.Enum() != nil {
				kind = string(f.Enum().FullName())
				enum(f.Enum())
			}
			oneof := ""
			if f.ContainingOneof() != nil {
				oneof = string(f.ContainingOneof().Name())
			}
			all[fmt.Sprintf("field %s = %d: %s %s, map %t, packed %t, oneof %q",
				f.FullName(), f.Number(), f.Cardinality(), kind, f.IsMap(), f.IsPacked(), oneof)] = true
		}
	}
	for _, name := range services {
		s := file.Services().ByName(name)
		if s == nil {
			t.Fatalf("service %s is missing in %s", name, file.Path())
		}
		for i := range s.Methods().Len() {
			m := s.Methods().Get(i)
			all[fmt.Sprintf("method %s(%s, stream %t) returns (%s, stream %t)", m.FullName(),
				m.Input().FullName(), m.IsStreamingClient(), m.Output().FullName(), m.IsStreamingServer())] = true
			message(m.Input())
			message(m.Output())
		}
	}
	return all
}

func TestOurProtocolIsThePublishedOne(t *testing.T) {
	mine, theirs := facts(t, ours(t), served), facts(t, published(), served)
	if len(theirs) < 250 {
		t.Fatalf("only %d facts of the published protocol were compared", len(theirs))
	}
	for fact := range theirs {
		if !mine[fact] {
			t.Errorf("missing in ours: %s", fact)
		}
	}
	for fact := range mine {
		if !theirs[fact] {
			t.Errorf("not in the published one: %s", fact)
		}
	}
	t.Logf("%d facts compared", len(theirs))
}

func TestEveryMessageOfOursIsReached(t *testing.T) {
	file := ours(t)
	reached := facts(t, file, served)
	for i := range file.Messages().Len() {
		if name := file.Messages().Get(i).FullName(); !reached[fmt.Sprintf("message %s", name)] {
			t.Errorf("%s is used by no served method", name)
		}
	}
}
