// A CUDA runtime of malloc, for the library that is preloaded over it.
#include <cstdlib>

namespace {
int current_device = 0, num_taken = 0, num_freed = 0;
}

extern "C" {

void fake_cudart_use(int device) { current_device = device; }
int fake_cudart_taken() { return num_taken; }
int fake_cudart_freed() { return num_freed; }

int cudaGetDevice(int* device) { return *device = current_device, 0; }
int cudaMalloc(void** address, size_t bytes) { return ++num_taken, *address = std::malloc(bytes), 0; }
// Of a library other than torch's allocator. Calls what the program's symbol is bound to, and returns here.
int fake_library_take(void** address, size_t bytes) { return cudaMalloc(address, bytes) != 0 || *address == nullptr; }
int cudaFree(void* address) { return ++num_freed, std::free(address), 0; }

}  // extern "C"
