# Compiles part of csrc/mpi once for each MPI ABI whose header is found. Only headers are needed:
# the library is found at run time. Without any header, the build has no MPI, and its summary says
# so.
#
# PYCOLL_MPI_INCLUDE: folders with mpi_abi.h (the standard ABI of MPI 5) and optionally MPICH's
# mpi.h (its older ABI, which Intel MPI also has and mpi4py's wheels use).
# PYCOLL_MPICC: a compiler wrapper, for an MPI with neither ABI, such as Open MPI 5: the core is
# then linked with that MPI.
option(PYCOLL_MPI "Links over MPI, if a header is found" ON)
set(PYCOLL_MPI_INCLUDE "" CACHE STRING "Folders where mpi_abi.h and MPICH's mpi.h may be")
set(PYCOLL_MPICC "" CACHE FILEPATH "mpicc of an MPI without the standard ABI, to link with")
set(PYCOLL_MPI_FILES api runtime mpi_exchange mpi_wire mpi_wire_end)
set(PYCOLL_MPI_ABIS)
set(PYCOLL_MPI_KNOWN)
set(PYCOLL_MPI_TEXT "")

function(pycoll_mpi_abi name folder header)
  list(TRANSFORM PYCOLL_MPI_FILES PREPEND ${CMAKE_SOURCE_DIR}/csrc/mpi/ OUTPUT_VARIABLE sources)
  list(TRANSFORM sources APPEND .cc)
  add_library(mpi_${name} OBJECT ${sources})
  target_include_directories(mpi_${name} PRIVATE ${CMAKE_SOURCE_DIR}/csrc)
  # SYSTEM: silences warnings of MPI's header.
  target_include_directories(mpi_${name} SYSTEM PRIVATE ${folder})
  target_compile_definitions(
    mpi_${name} PRIVATE PYCOLL_MPI_ABI=${name} PYCOLL_MPI_HEADER=<${header}> MPICH_SKIP_MPICXX
                        OMPI_SKIP_MPICXX ${ARGN})
  set_target_properties(mpi_${name} PROPERTIES PYCOLL_REACHABLE mpi_${name})
endfunction()

if(Python_EXECUTABLE)
  get_filename_component(python_folder ${Python_EXECUTABLE} DIRECTORY)
endif()
find_path(PYCOLL_MPI_ABI_FOLDER mpi_abi.h HINTS ${PYCOLL_MPI_INCLUDE} ${python_folder}/../include)
find_path(PYCOLL_MPICH_FOLDER mpi.h HINTS ${PYCOLL_MPI_INCLUDE} ${PYCOLL_MPI_ABI_FOLDER}
          PATH_SUFFIXES mpich)
if(PYCOLL_MPI AND PYCOLL_MPI_ABI_FOLDER)
  pycoll_mpi_abi(abi ${PYCOLL_MPI_ABI_FOLDER} mpi_abi.h)
  list(APPEND PYCOLL_MPI_ABIS mpi_abi)
  list(APPEND PYCOLL_MPI_KNOWN PYCOLL_MPI_HAS_ABI)
  set(PYCOLL_MPI_TEXT ", mpi")
endif()
if(PYCOLL_MPI AND PYCOLL_MPICH_FOLDER)
  # Checks that mpi.h is MPICH's.
  file(STRINGS ${PYCOLL_MPICH_FOLDER}/mpi.h version REGEX "define +MPICH_NUMVERSION")
  if(version)
    pycoll_mpi_abi(mpich ${PYCOLL_MPICH_FOLDER} mpi.h)
    list(APPEND PYCOLL_MPI_ABIS mpi_mpich)
    list(APPEND PYCOLL_MPI_KNOWN PYCOLL_MPI_HAS_MPICH)
    set(PYCOLL_MPI_TEXT ", mpi")
  endif()
endif()
if(PYCOLL_MPICC)
  enable_language(C)
  set(MPI_C_COMPILER ${PYCOLL_MPICC})
  find_package(MPI REQUIRED COMPONENTS C)
  list(GET MPI_C_INCLUDE_DIRS 0 folder)
  file(STRINGS ${folder}/mpi.h is_openmpi REGEX "define +OPEN_MPI")
  pycoll_mpi_abi(linked "${MPI_C_INCLUDE_DIRS}" mpi.h PYCOLL_MPI_LINKED)
  list(APPEND PYCOLL_MPI_ABIS mpi_linked)
  if(is_openmpi)
    list(APPEND PYCOLL_MPI_KNOWN PYCOLL_MPI_HAS_LINKED="openmpi")
  else()
    list(APPEND PYCOLL_MPI_KNOWN PYCOLL_MPI_HAS_LINKED="mpich")
  endif()
  link_libraries(MPI::MPI_C)
  set(PYCOLL_MPI_TEXT ", mpi (linked by ${PYCOLL_MPICC})")
endif()
