// cuda_api.h against NVIDIA's cuda.h, where one is found on the include path.
#include "../cuda_api.h"

#include "../status.h"
#include "check.h"

#if __has_include(<cuda.h>)
#include <cuda.h>

using namespace tasuki::cuda;

static_assert(sizeof(AllocationProp) == sizeof(CUmemAllocationProp) && sizeof(AccessDesc) == sizeof(CUmemAccessDesc));
static_assert(offsetof(AllocationProp, requested_handle_types) == offsetof(CUmemAllocationProp, requestedHandleTypes));
static_assert(offsetof(AllocationProp, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(AllocationProp, alloc_flags.gpu_direct_rdma_capable) == offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable));
static_assert(offsetof(AccessDesc, flags) == offsetof(CUmemAccessDesc, flags));
static_assert(sizeof(Address) == sizeof(CUdeviceptr) && sizeof(AllocationHandle) == sizeof(CUmemGenericAllocationHandle));
static_assert(kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY && kInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE && kAllocationPinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(kHandlePosixFd == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && kProtRead == CU_MEM_ACCESS_FLAGS_PROT_READ);
static_assert(kProtReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE && kGranularityMinimum == CU_MEM_ALLOC_GRANULARITY_MINIMUM);
static_assert(kAttributeVmm == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
static_assert(kAttributePosixFd == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
static_assert(kAttributeRdmaVmm == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
static_assert(kHostPortable == CU_MEMHOSTALLOC_PORTABLE && kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kEventDisableTiming == CU_EVENT_DISABLE_TIMING && kCaptureRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);

TEST(our_declarations_match_cuda_h) { CHECK(CUDA_VERSION >= 12000); }
#else
TEST(no_cuda_h_is_installed_so_nothing_was_compared) { CHECK(sizeof(tasuki::cuda::AllocationProp) == 32); }
#endif
