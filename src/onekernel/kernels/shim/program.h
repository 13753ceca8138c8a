// The main() of a sanitizer's build: reads one launch from a file, runs it, and writes back what the buffers then hold.
// A program of its own, because sanitizers want to be there from the start of a process; and every buffer is a heap
// block of exactly its size, so AddressSanitizer sees an access past the end of any of them.
//
// In: Config, number of arguments, then for each a kind and its content: 0, 8 bytes of value; 1, size, bytes of a
// buffer; 2, the index of an earlier argument with the same buffer; 3, size, bytes of a struct. All numbers have 8 bytes.
// Out: failed, message, the buffers of kind 1.
#pragma once

namespace shim {

struct Argument {
  u64 kind, value;
  unsigned char* buffer;
};

inline void read_all(FILE* file, void* to, size_t bytes) {
  if (bytes && fread(to, bytes, 1, file) != 1) abort();
}

inline void write_all(FILE* file, const void* from, size_t bytes) {
  if (bytes && fwrite(from, bytes, 1, file) != 1) abort();
}

}  // namespace shim

extern "C" int shim_launch(const shim::Config* config, void** args, char* message, size_t size);

int main(int, char** argv) {
  FILE* file = fopen(argv[1], "r+b");
  if (!file) abort();
  shim::Config config;
  shim::u64 count;
  shim::read_all(file, &config, sizeof config);
  shim::read_all(file, &count, sizeof count);
  std::vector<shim::Argument> arguments(count);
  std::vector<void*> pointers;
  for (auto& argument : arguments) {
    shim::read_all(file, &argument, 16);
    if (argument.kind == 1 || argument.kind == 3) {
      argument.buffer = static_cast<unsigned char*>(malloc(argument.value));  // aligned to 16 bytes
      shim::read_all(file, argument.buffer, argument.value);
    } else if (argument.kind == 2) {
      argument.buffer = arguments[argument.value].buffer;
    }
    pointers.push_back(argument.kind == 0   ? static_cast<void*>(&argument.value)
                       : argument.kind == 3 ? static_cast<void*>(argument.buffer)
                                            : &argument.buffer);
  }
  char message[1024] = "";
  shim::u64 failed = static_cast<shim::u64>(shim_launch(&config, pointers.data(), message, sizeof message));
  rewind(file);
  shim::write_all(file, &failed, sizeof failed);
  shim::write_all(file, message, sizeof message);
  for (auto& argument : arguments) {
    if (argument.kind == 1) shim::write_all(file, argument.buffer, argument.value);
    if (argument.kind == 1 || argument.kind == 3) free(argument.buffer);
  }
  return fclose(file);
}
